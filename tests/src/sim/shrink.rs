//! From a run that fails to a short one that fails by the same rule.

use super::scenario::Step;

/// Leaves out steps as long as `fails` says that the rest still fails. Large pieces first, then smaller ones; it ends
/// when no single step can be left out, or after `attempts` runs.
pub(super) fn shrink(
    steps: &[Step],
    mut attempts: usize,
    mut fails: impl FnMut(&[Step]) -> bool,
) -> Vec<Step> {
    let mut kept = steps.to_vec();
    let mut piece = kept.len().div_ceil(2).max(1);
    loop {
        let mut start = 0;
        let mut shorter = false;
        while start < kept.len() && attempts > 0 {
            let end = (start + piece).min(kept.len());
            let rest: Vec<Step> = kept[..start].iter().chain(&kept[end..]).cloned().collect();
            attempts -= 1;
            if fails(&rest) {
                kept = rest;
                shorter = true;
            } else {
                start = end;
            }
        }
        if attempts == 0 || (piece == 1 && !shorter) {
            return kept;
        }
        if piece > 1 {
            piece = piece.div_ceil(2);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sim::scenario::Action;

    #[test]
    fn what_matters_is_kept() {
        let steps: Vec<Step> = (0..200).map(|at| Step { at, action: Action::Terminate { app: 0 } }).collect();
        let needs = |steps: &[Step]| [17, 101, 102].iter().all(|at| steps.iter().any(|step| step.at == *at));
        let kept: Vec<u64> = shrink(&steps, 10_000, needs).into_iter().map(|step| step.at).collect();
        assert_eq!(kept, [17, 101, 102]);
        assert!(shrink(&steps, 5, needs).len() < 200);
    }
}
