"""What the owner of this machine allows: each cap is enforced, shown, and known to the planner.

| setting in `[limits]` | enforced in |
|---|---|
| `upload_limit`, `download_limit` | node/transport (a token bucket over all connections) |
| `threads`, `device` | devices.py, before the model is built |
| `max_memory` | memory.py: before joining, and while training |
| `quota` | ledger.py (what counts) and ledger_file.py (kept on disk) |
| `schedule` | timetable.py |
| `when_idle` | idleness.py (what it means) and other_load.py (what can be known) |

Read in this order: units (how a person writes an amount), settings (`Caps`, all of them at once),
then the modules above, then watching (`open_caps`: who looks at them while a node trains).
"""
