"""A party's end."""
