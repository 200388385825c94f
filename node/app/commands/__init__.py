"""One module per command, each with `add_parser(subparsers)` and `run(arguments) -> int`.

`catalogue` lists the commands; the other modules here help them. `output` prints for people and
programs, `interruption` runs trio under signals, `reference` writes docs/cli.md. Errors become exit
codes in node/core/failure.py.
"""
