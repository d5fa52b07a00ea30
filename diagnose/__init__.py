"""One script a question; `python -m diagnose` asks every cheap one and gives one verdict."""
