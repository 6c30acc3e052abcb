"""Issues of GitHub, from its archive of events."""
