"""One module per command, each with `add_parser(subparsers)` and `run(arguments) -> int`.

`catalogue` finds them, `output` prints for people and programs, `failure` turns errors into exit
codes, `interruption` runs trio under signals, `reference` writes docs/cli.md.
"""
