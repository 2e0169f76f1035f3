"""The ledger of runs: plain values in, tables, figures and files out."""
