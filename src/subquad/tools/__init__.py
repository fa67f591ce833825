"""Tools: facts about models, self-test, export of programs, music."""
