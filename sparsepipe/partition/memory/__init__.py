"""What a stage keeps in the memory of each of its devices."""
