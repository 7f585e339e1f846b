"""Names of AMD Quark that are elsewhere here, or not here at all: imports say what to write instead.

:mod:`quark.migration.finder` answers imports, by the table :mod:`quark.migration.answers` reads from ``answers.json``.
"""
