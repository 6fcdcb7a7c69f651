"""What weight learners are compared with: averaging, personalisation, training alone."""
