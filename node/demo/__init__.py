"""`potluck demo`: a whole run on this machine, told while it happens (driver.py)."""
