"""The engines Forerun is measured beside; each module imports its library only when it is asked to run."""
