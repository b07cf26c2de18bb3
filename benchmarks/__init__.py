"""One script a question; dated reports in `results/`."""
