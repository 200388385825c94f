"""The owner's limits for this machine: each cap is enforced, shown, and known to the planner.

| setting in `[limits]` | enforced in |
|---|---|
| `upload_limit`, `download_limit` | node/net/transport/traffic.py (over all connections) |
| `threads`, `device` | devices.py, before the model is built |
| `max_memory` | memory.py: before joining, and while training |
| `max_device_memory` | device_memory.py: before joining, and by torch |
| `offload` | protocols/accumulation/steps.py: what stays off the GPU |
| `compile` | node/run/compiled_loss.py |
| `quota` | ledger.py |
| `schedule` | timetable.py |
| `when_idle` | idleness.py |

Read in this order: units (how a person writes an amount), settings (`Caps`, all of them together),
then the modules above. node/training/caps_watch.py looks at them while a node trains.
"""
