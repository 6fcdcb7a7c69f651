"""With whom should we train? Screening, placebos, folds, and the page that answers."""
