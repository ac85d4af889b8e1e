"""The gateway: who may join, what is leased to whom, reputations; no research data at rest (layer 3)."""
