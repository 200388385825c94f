"""The commands and screens that a person uses. No other layer imports this one.

`main` finds a command in `commands` and runs it, in the frame that is `cli`. `views` are texts for
a person, `screen` draws a training node, `doctor` examines this machine, `demo` plays a whole run.

The modules beside them are the work of commands. `foreground` trains for `join` and `run start`,
and `trainer_client` asks a node that trains. `login_flow` logs in, with the invite and code of
`login_inputs`. `link_report` is a bare node, `pinger` measures a link, `swarm_client` asks the
swarm one question, and `backbone` has the figures of an organiser's peer. `auth_service` is a
running auth server, `moderation` has the acts of a moderator, and `auth_acts` brings them there.
`systemd` is the service of a volunteer.
"""
