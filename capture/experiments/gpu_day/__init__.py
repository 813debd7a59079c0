"""Everything a GPU can tell, in parts that each keep their rows as they come: `make gpu`."""
