"""Know before you run: what a step would hold and move, on machines that are not there."""
