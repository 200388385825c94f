"""Runs: an organiser defines and signs one and invites volunteers, who check and build it.

Read in this order: `definition` (the contents of run.toml), `mistakes` and `checking` (its
errors), `signed`, `invite`, `folder` (the organiser's), `kept` (a volunteer's), `costs` and
`dry_run` (what the run needs from a machine), `building` and `batches` (model, optimizer and data),
`trusted` (an organiser's own code), `checkpoints` with `checkpoint_file` and `checkpoint_keeper`,
`exporting`.
"""
