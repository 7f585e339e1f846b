"""The papers' mathematics: arrays in, arrays out, one file per paper. No model type is known here."""
