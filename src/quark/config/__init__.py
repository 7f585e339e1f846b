"""The one language that every dialect compiles to: specs, rules, options, presets, the Plan."""
