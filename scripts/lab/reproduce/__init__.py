"""The papers' claims, measured again: `scripts/reproduce`.

`claim` says what a claim and a finding are. The claims stand in a module for each source; they take
their measurements from `lab.bench`, `lab.simulate` and the product. `page` writes docs/results.md.
"""
