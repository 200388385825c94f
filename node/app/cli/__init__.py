"""The frame of every command: its parser and settings, its output, its signals and exit code.

`catalogue` lists the commands and finds the one that was typed. `parser` and `configured` are for
the flags, `output` prints for people and programs, `line_queue` and `log_output` print while a node
runs, and `interruption` runs trio under signals. `reference` writes docs/cli.md.
"""
