"""The demo's pure parts, and the backbone peer's HTTP face; the whole demo is in processes/."""
