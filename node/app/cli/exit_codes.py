"""The exit codes of every command. Scripts and systemd units rely on them: they do not change."""

DONE = 0
FAILED = 1
WRONG_USE = 2
REFUSED = 3
UNREACHABLE = 4
INTERRUPTED = 130  # 128 + SIGINT: Ctrl-C, in every command
BROKEN_PIPE = 141  # 128 + SIGPIPE: the reader of our output went away
TERMINATED = 143  # 128 + SIGTERM; a node that was running answers SIGTERM with DONE instead

MEANINGS = {
    DONE: "done (also: a running node that was told to stop by SIGTERM)",
    FAILED: "failed",
    WRONG_USE: "wrong use: impossible flags, addresses or settings, or a named file "
    "(settings, an invite, run.toml) that is not there or cannot be read",
    REFUSED: "refused: not allowed",
    UNREACHABLE: "unreachable: the peer, or the running node",
    INTERRUPTED: "Ctrl-C",
    BROKEN_PIPE: "the reader of the output went away",
    TERMINATED: "SIGTERM, before a node was running or in any other command",
}
