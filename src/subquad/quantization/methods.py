"""The quantisation methods of this package, without the code that they need: see `quantized.py`."""

# Their names on the command line, and in a `config.json`. The class of a configuration is
# `Int8Config` for int8.
METHODS = {"int8": "subquad_int8", "int4": "subquad_int4"}
# Name of the scales of a `weight`, in a module and in files.
SCALE = "weight_scale"
