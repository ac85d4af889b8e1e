"""The lab node: data, lowering, jobs (layer 3)."""
