"""What a volunteer trains with, and what is told of it."""
