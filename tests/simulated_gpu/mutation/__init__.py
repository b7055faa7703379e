"""Every wait of the runtime is taken out once, to see that something notices. See `table.py`."""
