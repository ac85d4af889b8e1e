"""Programs: what a volunteer runs, how one is made, priced, checked and executed (layer 1)."""
