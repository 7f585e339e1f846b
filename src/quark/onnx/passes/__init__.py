"""Graph passes: one file each, ``run(model, …) -> PassReport``, in place, outputs unchanged, linear in the graph."""
