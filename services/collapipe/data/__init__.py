"""The rows of a job's data. Nothing here imports torch, so that a client can check data before anything starts.

Reading order: `rows` defines a row, and `columns` finds its columns. `sources` reads files of lines, `tables` reads other files, and
`hub` and `stdlib_docstrings` read data sets. `hold_out` chooses rows to evaluate. `row_counts` counts what is in rows, and
`findings` says what a person should know about that. `cluster_rows` keeps the rows of one cluster, which `sharding` chooses.
"""
