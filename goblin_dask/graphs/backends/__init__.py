"""Where programs run: NumPy, which every machine has, CuPy and PyTorch. A volunteer's owner chooses."""
