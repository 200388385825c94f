"""The live screen of `potluck join` and `potluck run start`.

From the inside out: cells.py measures text, charts.py and layout.py know nothing of training,
picture.py makes lines of a view (pure), canvas.py makes of lines what a terminal obeys (pure),
terminal.py writes that, and live.py says when.
"""
