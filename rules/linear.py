"""placeholder, being written"""
RULES: tuple = ()
