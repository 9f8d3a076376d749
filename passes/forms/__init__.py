"""Normal forms of operations, by kind; :mod:`autopar.passes.normalize` applies them."""
