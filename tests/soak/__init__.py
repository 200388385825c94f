"""Long tests: hours of churn, sweeps of moments, bad links. CI runs each in a short form.

| what | short form | long form |
|---|---|---|
| churn | some seconds | POTLUCK_SOAK_SECONDS, by default ten minutes |
| Ctrl-C | a dozen moments, in tests/processes | a hundred moments of each kind |
| links | some hundred kilobytes over each rung | many megabytes |
| caps | that they are known, and what they refuse, in tests/processes | measured while it trains |
"""
