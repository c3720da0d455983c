"""The commands of the program, one a file; :mod:`torchpact_recipes.commands.register` adds them to it."""
