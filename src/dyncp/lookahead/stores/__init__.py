"""Where planners put plans and trainers fetch them."""
