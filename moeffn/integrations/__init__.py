"""Bridges to other libraries. Each imports its library on its own import, so this package alone needs none of them."""
