"""Credit: what each peer keeps of the rounds that it was in, and how all of it is added up."""
