"""Networks, optimisers and data that a run can name. Ground floor."""
