"""The commands: every module here is a command of `potluck` or one of its subcommands.

`run_start` is `potluck run start`. A command has `add_parser(subparsers)` and
`run(arguments) -> int`, and its name in node/app/cli/catalogue.py. What commands share is in
`node.app.cli`, and the work that needs a module of its own lies in `node.app`, beside this package.
Errors become exit codes in node/core/failure.py.
"""
