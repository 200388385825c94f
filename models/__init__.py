"""Networks, optimizers and data that a run can name. It imports no other package of potluck."""
