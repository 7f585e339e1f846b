"""How far a quantized model is from its float model, from the values that both computed: knows no model."""
