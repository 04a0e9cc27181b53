"""Bottom models (a party's), top models (the label holder's), and what all learn by."""
