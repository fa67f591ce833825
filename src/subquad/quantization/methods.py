"""The quantisation methods of this package, without the code that they need: see `quantized.py`."""

# What the command line calls them, and what they are called in a `config.json`. The class of a configuration is
# `Int8Config` for int8.
METHODS = {"int8": "subquad_int8", "int4": "subquad_int4"}
# How the scales of a `weight` are named in a module and in files.
SCALE = "weight_scale"
