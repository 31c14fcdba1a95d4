"""What every room stands on: errors, files, text made plain, processes, HTTP; imports nothing else of the package."""
