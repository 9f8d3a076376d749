"""What may be split how: one row of factors per ATen operation."""
