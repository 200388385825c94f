"""The commands and screens that a person uses. No other layer imports this one.

`main` finds a command in `commands` and runs it. `screen` draws a training node, `demo` plays a
whole run, `auth_service` is a running auth server, `backbone` the figures of an organiser's peer,
`systemd` the service of a volunteer.
"""
