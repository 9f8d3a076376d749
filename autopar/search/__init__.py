"""The choice of a plan: what to split how, from options and prices."""
