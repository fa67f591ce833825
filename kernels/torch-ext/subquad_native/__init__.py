"""
Libraries of C that are compiled on this machine when they are first used. Only the standard library is imported, so
operators and tokenizers can both use this.
"""
