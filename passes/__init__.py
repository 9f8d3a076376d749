"""The graph: what may be split how (rules), and the rewrites from one device's step to the programs of all ranks."""
